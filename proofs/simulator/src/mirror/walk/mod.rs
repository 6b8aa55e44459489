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
mod model;
mod replica;
mod rules;
mod session;
#[cfg(test)]
mod tests;
mod trial;

pub use trial::{LOADS, run};
