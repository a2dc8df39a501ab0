"""Memory of one arm: what is stored, what is resident, and what each phase takes, as a receipt."""
