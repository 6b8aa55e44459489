//! The stack on a simulated disk, clock and scheduler, from one seed.
//!
//! A [`trial`] makes a device, lets hosts use it, stops its machine at a drawn start or end of an I/O, keeps a drawn part
//! of what was not durable, and looks at what is left: every block must hold something that the rules of a disk with a
//! volatile cache permit, with tags that match, and damage must be found where it was done and nowhere else.
//!
//! Nothing here reads a clock, a random source of the system or the order of a hash table, so a seed is a run. The parts
//! know nothing of protected volumes; [`system`] is where they come in.

pub mod checker;
pub mod client;
pub mod damage;
pub mod disk;
pub mod executor;
pub mod machine;
pub mod mirror;
pub mod random;
#[cfg(test)]
mod reference_device;
pub mod system;
pub mod system_under_test;
#[cfg(test)]
mod tests;
pub mod trial;
pub mod workload;
