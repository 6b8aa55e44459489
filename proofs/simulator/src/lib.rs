//! Runs the stack on a simulated disk, clock and scheduler, from one seed.
//!
//! A [`trial`] makes a device, lets hosts use it, stops its machine at a random start or end of an I/O, keeps a random
//! part of the unflushed writes, and checks the rest. Every block must have a content that the rules of a disk with a
//! volatile cache permit, with matching tags. Damage must be found where it was injected and nowhere else.
//!
//! Nothing here reads a clock, the system's random numbers or the order of a hash table, so a seed repeats a run. Only
//! [`system`] depends on protected volumes.

pub mod checker;
pub mod client;
pub mod cores;
pub mod damage;
pub mod disk;
pub mod executor;
pub mod machine;
pub mod mirror {
    //! Mirrors of protected volumes, each volume on its own disk, with broken links, power cuts and bit rot.
    //!
    //! A seed determines 2 to 4 replicas and several machines. While hosts use the mirror, replicas go offline, hang,
    //! fail changes, return after a kill or a power cut, are added and removed. A machine stops at any start or end of
    //! an I/O of any replica, and the next one finds any subset of replicas. The rules are in the README.

    mod damage;
    mod events;
    mod harness;
    mod linked;
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
    pub mod walk {
        //! Walks: mirrors of replicas in RAM, whose images are saved, restored, exchanged, wiped and damaged between
        //! opens.
        //!
        //! The other simulation has disks that lose and tear writes. A walk instead makes a random history: which
        //! replicas are present, in which order, which of them is an older image or a copy, which were written without
        //! the others, where label writes are interrupted. A model records everything that was acknowledged in every
        //! history, and the history of each image. The rules:
        //!
        //! - A read returns the newest acknowledged content of the one history that the open mirror represents, or
        //!   fails; it fails only if no replica in sync has the block.
        //! - A mirror neither opens nor reattaches a replica if it would then lose acknowledged and flushed writes that
        //!   an online replica has.
        //! - It opens if all present replicas have one history, one of them has all of it, and no label proves later
        //!   writes.
        //! - Neither the last good copy of a block nor its last readable copy is ever destroyed.
        //! - Replicas in sync without dirty regions are identical and match the model; if a verify finds no damage,
        //!   there is none.

        mod behind;
        mod harness;
        mod linked;
        mod model;
        mod replica;
        mod rules;
        mod session;
        #[cfg(test)]
        mod tests;
        mod trial;

        pub use trial::{LOADS, run};
    }

    pub use trial::{LOADS, run};
}
pub mod random;
#[cfg(test)]
mod reference_device;
pub mod shards;
pub mod system;
pub mod system_under_test;
#[cfg(test)]
mod tests;
pub mod trial;
pub mod workload;
