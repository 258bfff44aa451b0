"""
What may be set up wrongly: facts are gathered once, and pure functions find what is amiss.

`facts` is what is known, `nodes` and `app` gather it, `check_nodes`, `check_cluster` and
`check_tasks` make findings of it, `diagnosis` does all of that.
"""
