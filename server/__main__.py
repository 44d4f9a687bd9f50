"""``python -m server``."""

import signal

if __name__ == "__main__":
    # Ctrl-C is to leave no traceback: the imports take seconds and the model longer. Once it
    # listens, the server takes the signal over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    import typer

    from server.command import main

    typer.run(main)
