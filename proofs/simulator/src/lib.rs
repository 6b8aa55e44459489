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
pub mod mirror {
    //! Mirrors of protected volumes, each on its own disk, whose links break, whose power fails and whose content decays.
    //!
    //! A seed draws 2 to 4 replicas and several machines. While hosts use the mirror, replicas go away, hang, fail changes, come back on
    //! what a kill or a power cut has left of them, are added and taken out; a machine stops at any start or end of an I/O of
    //! any replica, and the next one finds any subset of replicas. The rules are in the README.

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
        //! Walks: mirrors of replicas in RAM, whose images are kept, put back, exchanged, wiped and damaged between openings.
        //!
        //! The simulation beside this one has disks that lose and tear; here what is drawn is the history: which replicas are there,
        //! in which order, which of them is an older image or a copy, who was written without whom, where labels are cut off. A model
        //! knows everything that was acknowledged, in every history, and to which of them each image belongs. The rules:
        //!
        //! - A read gives the newest acknowledged content of the one history that the open mirror represents, or fails; it fails only
        //!   if no replica in sync has the block.
        //! - A mirror neither opens nor reattaches a replica if a replica that is online holds acknowledged and flushed writes that the
        //!   mirror would not have.
        //! - It opens if all replicas that are there have one history, one of them has all of it, and no label knows of more.
        //! - The last good copy of a block is never destroyed, nor the last readable one.
        //! - Replicas in sync with nothing unsettled are the same and as the model says; what verify calls clean is.

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
pub mod system;
pub mod system_under_test;
#[cfg(test)]
mod tests;
pub mod trial;
pub mod workload;
