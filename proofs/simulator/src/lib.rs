//! The stack on a simulated disk, clock and scheduler, from one seed.
