//! The vocabulary all hops share: Operation, Device, Gate, Medium.
