"""On PYTHONPATH of the servers that profile_start.py starts: every process notes what it does.

Each line of a process's file is one sample of its main thread: the seconds since the last sample,
and the frames, innermost first. A call that holds the interpreter makes one long sample.
"""

import os
import sys
import threading
import time


def _sample(path: str, period: float) -> None:
    main = threading.main_thread().ident
    last = time.perf_counter()
    with open(path, "w", buffering=1) as file:
        while (frame := sys._current_frames().get(main)) is not None:
            now = time.perf_counter()
            frames = []
            while frame is not None:
                frames.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
                frame = frame.f_back
            file.write("\t".join([f"{now - last:.4f}", *frames]) + "\n")
            last = now
            time.sleep(period)


if "START_SAMPLES" in os.environ:
    arguments = (
        f"{os.environ['START_SAMPLES']}/{os.getpid()}.txt",
        float(os.environ["START_PERIOD"]),
    )
    threading.Thread(target=_sample, args=arguments, daemon=True).start()
