//! A mirror of devices in RAM that can be damaged, and can go away and come back.

mod assemble;
mod coverage;
mod create;
mod damage;
mod flushes;
mod harness;
mod interrupted;
mod labels;
mod lineage;
mod paging;
mod replicas;
mod requests;
mod sets;
mod stale;
