"""Tenants share a server and never its prefix cache."""


def engine_salt(tenant: str, client_salt: str) -> str:
    """The cache salt that the engine gets; no two tenants and no two client salts share one.

    The tenant's length stands before its name, so a client's salt cannot imitate another
    tenant.  Without a tenant (a server without keys) it is the client's salt.
    """
    return f"{len(tenant)}:{tenant}{client_salt}" if tenant else client_salt
