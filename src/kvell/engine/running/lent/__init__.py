"""Attention over lent pages across a connection: a creditor's answers, a debtor's queries."""
