"""The published outcomes of the sweeps."""

from architectures import results


def test_the_page_agrees_with_the_recorded_outcomes():
    assert results.read_page() == results.render()


def test_no_recorded_outcome_is_wrong():
    wrong = {
        (name, check): entry[check]["reasons"]
        for name, entry in results.read_types().items()
        for check in results.CHECKS
        if entry.get(check, {"result": "right"})["result"] == "wrong"
    }
    assert not wrong
