"""Several instances behind one front: which one gets a request, and what each gets of its host."""
