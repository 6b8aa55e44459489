//! Mirrors of protected volumes, each on a disk of its own, whose lines break, whose power goes and whose content decays.
//!
//! A seed draws 2 to 4 legs and several machines. While hosts use the mirror, legs go away, hang, fail changes, come back on
//! what a kill or a power cut has left of them, are added and taken out; a machine stops at any start or end of an I/O of
//! any leg, and the next one finds any subset of legs. The rules are in the README.

mod clock;
mod damage;
mod events;
mod legs;
mod machine;
mod making;
mod old;
mod quiesced;
mod replacing;
mod site;
mod split_brain;
#[cfg(test)]
mod tests;
mod trial;
pub mod walk;
mod world;

pub use trial::{LOADS, run};
