"""Recipe -> engines -> stages -> job: nothing but construction, and the only place where engines meet stages."""
