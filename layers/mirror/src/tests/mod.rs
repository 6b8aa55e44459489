//! A mirror of devices in RAM that can be damaged, and can go away and come back.

mod damage;
mod forgotten;
mod judge;
mod legs;
mod paging;
mod requests;
mod rig;
mod sets;
mod stale;
