"""``python -m server``."""

import os
import signal

if __name__ == "__main__":
    # Ctrl-C is to leave no traceback: the imports take seconds and the model longer. Once it
    # listens, the server takes the signal over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Torch's threads are to sleep where they wait for one another: spinning, they kept the last one
    # off its core beside busy neighbours (a step took four times as long), and the event loop off
    # its own. It is read where torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    import typer

    from server.command import main

    typer.run(main)
