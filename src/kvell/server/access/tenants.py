"""The separation of tenants' cached prefixes on a shared server."""


def engine_salt(tenant: str, client_salt: str) -> str:
    """Return the engine's cache salt, which is unique for each tenant and client salt.

    The length of the tenant's name precedes the name, so a client's salt cannot imitate another
    tenant.  On a server without keys there is no tenant and the client's salt is returned.
    """
    return f"{len(tenant)}:{tenant}{client_salt}" if tenant else client_salt
