"""
What locks cost a process, and what is left when they are interrupted.

    python -m resources --cycles 100000 --json FILE     threads, descriptors, memory
    python -m resources --exits                         how long a process takes to end
    python -m resources --opcodes                       an exception at every bytecode

Run with ``PYTHONPATH=tests``; the tests beside this do the same on a smaller scale.
"""
