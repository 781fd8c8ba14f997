"""Attention over lent pages by messages: a creditor's answers and a debtor's queries."""
