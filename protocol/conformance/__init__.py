"""Checks that any server of the Responses API can be put to, ours among them.

``rules`` says what has to hold and who says so. A check (``check``) plays a scenario: a generator
that yields ``actions`` and is given what came of them. ``play`` plays it, keeps what went over the
wire, and has every stream judged by ``stream_grammar``, whatever the check is about. ``catalogue``
lists all checks. Nothing here opens a socket: whoever plays a check performs its actions.
"""
