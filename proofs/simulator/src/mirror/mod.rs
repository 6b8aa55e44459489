//! Mirrors of protected volumes, each on its own disk, whose links break, whose power fails and whose content decays.
//!
//! A seed draws 2 to 4 replicas and several machines. While hosts use the mirror, replicas go away, hang, fail changes, come back on
//! what a kill or a power cut has left of them, are added and taken out; a machine stops at any start or end of an I/O of
//! any replica, and the next one finds any subset of replicas. The rules are in the README.

mod clock;
mod damage;
mod events;
mod harness;
mod machine;
mod making;
mod old;
mod quiesced;
mod replacing;
mod replica;
mod replica_env;
mod split_brain;
#[cfg(test)]
mod tests;
mod trial;
pub mod walk;

pub use trial::{LOADS, run};
