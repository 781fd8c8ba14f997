"""Ray places a cluster's manager and its instances on machines; the only folder that imports Ray.

::

    fronts ── find_manager ──► ManagerActor      a named detached actor, started again by Ray
                                 │ ── a placement group ──► Ray      bundles spread over machines
                                 │ ── start, stop ──► LauncherActor ──► Launcher ──► kvell instance
                                 └──── the instance protocol, over TCP ───────────────┘ ◄── fronts

Ray sees orders and ends, never a prompt, a token or a page.  When a machine dies, Ray starts its
actors elsewhere.  Launchers start nothing by themselves: the manager orders the next incarnation,
with its own bounds.  A manager that Ray has started again reads in Ray's records what the manager
before it had reserved, and finds the launchers by their names.
"""
