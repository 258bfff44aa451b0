"""
What may be set up wrongly: facts are gathered once, and pure functions find what is amiss.

`facts` is what is known, `nodes`, `app` and `peer_facts` gather it, `check_nodes`,
`check_cluster`, `check_tasks` and `check_migration` make findings of it, `diagnosis` does all of
that. `peers` is how other libraries are known, `advice` what is to be written for their options.
"""
