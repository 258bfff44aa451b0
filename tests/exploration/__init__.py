"""
All that can happen, looked at: two small models of the protocol, explored to the end.

Chance and directed schedules find what somebody thought of. Here three nodes and two clients
are small enough for every order of deliveries, expiries, restarts and timeouts to be tried.

- `fencing`: no clock at all; fences are unique, and grow for whoever asks after a grant.
- `repair`: time in ticks; nobody trusts the lock while another does.

The clients decide by the library's own code (`decisions`), the nodes are pure functions
(`nodes`) that a test holds to the simulated nodes. `python -m exploration` with
``PYTHONPATH=tests`` explores both, with all guards on and with some switched off.
"""
