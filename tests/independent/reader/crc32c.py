"""CRC-32C: Castagnoli, reflected, initial value and final XOR 0xFFFFFFFF."""

_POLYNOMIAL = 0x82F63B78


def _make_table():
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _make_table()


def crc32c(*parts):
    """Return the CRC of the parts, one after another."""
    crc, table = 0xFFFFFFFF, _TABLE
    for part in parts:
        for byte in part:
            crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF
