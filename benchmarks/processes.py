"""What it costs to have engines and trainer in processes of their own.

    python benchmarks/processes.py            # on the CPU
    python benchmarks/processes.py --quick    # fewer repeats, a smaller model
    python benchmarks/processes.py --gpu      # weight sync on a GPU: the shape of Qwen3-0.6B in bf16

The last line is one JSON object.

- `pause_ms_thread`, `pause_ms_process`: how long an engine that generates stands still for new weights, in a thread of
  the trainer's process and in its own; median over updates. `prepare_ms_*` is what happens before that, while it
  generates, and `publish_ms_*` what the trainer does. `same_weights_*`: hashes of what the engine then serves are those
  of the trainer.
- `publish_gb_s`: laying weights into shared memory; `publish_over_memcpy` is its speed over that of a plain copy of the
  same bytes, each into memory that was written before, medians of interleaved repeats.
- `shm_put_get_gb_s`: jagged rows (512 of about 4096 tokens) put into the `shm` data plane by one process and fetched by
  another; `shm_over_memcpy` is its speed over that of a plain copy of the same bytes. `memory_put_get_us`: a group put
  into the `memory` data plane and fetched.
- `router_us`: what the router of a fleet adds to a request.
- `codec_us`: CPU time of encoding and decoding the messages of one generate call (64 tokens each way), both sides.
- `two_ranks_over_one`: tokens/s of a fleet of two engine processes with one thread each, over those of one process with
  two threads; `one_rank_tok_s` and `two_ranks_tok_s` are the two speeds.
- `restart_s`: from the death of the trainer's process (SIGKILL) to the next finished step, with `runtime.restarts`:
  noticing it, closing what is left, building everything anew, loading the checkpoint, and one step of a tiny model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support.codec import codec_us
from benchmarks.support.published_weights import cpu_case, gpu_case, pause_figures, publish_figures
from benchmarks.support.restart import restart_seconds
from benchmarks.support.router import router_us
from benchmarks.support.shm_speed import memory_put_get_us, shm_speed
from benchmarks.support.two_ranks import rank_figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, a smaller model")
    parser.add_argument("--gpu", action="store_true", help="only weight sync, on a GPU")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    case = gpu_case(quick=arguments.quick) if arguments.gpu else cpu_case(quick=arguments.quick)
    figures |= pause_figures(case)
    figures |= publish_figures(quick=arguments.quick)
    if not arguments.gpu:
        figures |= shm_speed(repeats=9 if arguments.quick else 25) | {"memory_put_get_us": memory_put_get_us()}
        figures |= {"router_us": router_us(), "codec_us": codec_us()}
        figures |= rank_figures(case, passes=3 if arguments.quick else 7)
        figures["restart_s"] = restart_seconds(times=1 if arguments.quick else 3)
    for name, value in figures.items():
        print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}))


if __name__ == "__main__":
    main()
