"""Runs code that a language model has written, see `client` (here), `server` and `jail` (there) and `asserts` (who may say what).

trainer ── fds ──▶ server, one per core ── fork ──▶ program in its jail        stdin and stdout are memory files
                                        └─ fork ──▶ tests in another one ◀─ pipes ─▶ program
"""
