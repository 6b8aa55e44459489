//! A mirror of devices in RAM that can be damaged, and can go away and come back.

mod assemble;
mod coverage;
mod cut;
mod damage;
mod flushes;
mod forgotten;
mod legs;
mod lineage;
mod made;
mod paging;
mod requests;
mod rig;
mod sets;
mod stale;
