"""Remote sections of requests: the debtor's side of the loans."""
