"""The blocks of rows: as many as are read, multiplied and summed at a time."""

from dataclasses import dataclass

from daskrr.errors import check_count
from daskrr.runtime.rows import Rows

# A block should be worth its p × p partial sum and its share of task overhead, no block should take minutes, and that
# of an array without chunks is in memory as a whole.
BLOCK_FLOPS = 1e9
MAX_BLOCK_ROWS = 65536
MAX_BLOCK_BYTES = 128 * 2**20
ROWS_PER_LANDMARK = 8

# A GPU has done with a block before a processor has read it, unless it is a large one, and the more landmarks there are
# the longer takes the sum that comes back.
GPU_BLOCK_ROWS, GPU_ROWS_PER_LANDMARK = 2**17, 2**6

# A byte is decoded in about the time of 50 flops, and may take a twentieth of a block's time.
FLOPS_PER_DECODED_BYTE = 1000


@dataclass(frozen=True)
class Block:
    """Rows ``start`` to ``stop`` of the input, a leaf of the tree of sums."""

    index: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def block_rows(n_landmarks: int, rows: Rows, wanted: int | None = None, on_gpu: bool = False) -> int:
    """Rows of a block, chosen by the device, the number of landmarks and the input's chunks, never by n or the workers.

    Whole chunks where they are small. A large chunk is shared by several blocks, each of which decodes it anew, as long
    as that costs little beside its work: a few large chunks would leave workers idle at the end of a pass. A height
    that was found here and is wanted again is found again.
    """
    unit = rows.unit_rows
    if wanted is None:
        by_flops = min(MAX_BLOCK_ROWS, int(BLOCK_FLOPS / n_landmarks**2))
        wanted = min(max(by_flops, ROWS_PER_LANDMARK * n_landmarks), MAX_BLOCK_ROWS // 2)
        if on_gpu:
            wanted = max(GPU_BLOCK_ROWS, GPU_ROWS_PER_LANDMARK * n_landmarks)
        wanted = 1 << (wanted - 1).bit_length()
        wanted = max(1, min(wanted, MAX_BLOCK_BYTES // rows.row_bytes))
        worth_decoding = FLOPS_PER_DECODED_BYTE * unit * rows.row_bytes / (2 * n_landmarks**2)
        wanted = max(wanted, min(unit, int(worth_decoding)))
    check_count("block_rows", wanted)
    if wanted < unit:
        return -(-unit // -(-unit // wanted))
    return unit * round(wanted / unit)


def split(n_rows: int, height: int) -> list[Block]:
    """Cut ``n_rows`` into blocks of ``height`` rows; the last may be shorter."""
    starts = range(0, n_rows, height)
    return [Block(i, start, min(start + height, n_rows)) for i, start in enumerate(starts)]
