//! SCSI block devices: command descriptor blocks, sense data, and the pages and parameter data by which a device describes itself.
//!
//! Clauses are those of SBC-4 (block commands) and SPC-5 (all devices). Everything is read and written here, for initiators and for
//! targets alike.
//!
//! Invariants:
//! - What is read comes from another machine: lengths in it are cut to the bytes that are there, and no bytes make a reader panic,
//!   loop or allocate more than they are.
//! - Fields that a reader knows survive reading and writing; reserved ones are written as zero and ignored when read.

mod cdb;
mod command;
mod inquiry;
mod parameter;
mod sense;
#[cfg(test)]
mod tests;
mod vpd;
mod wire;

pub use cdb::{BlockCommand, ByteCheck, Cdb, ExpectedTags, Invalid, Protect, WriteSame};
pub use command::Command;
pub use inquiry::{Inquiry, text};
pub use parameter::{
    CachingPage, ControlPage, LbaStatus, LbaStatusList, ModeSense, PiProfile, ProvisioningStatus, ReadCapacity16,
    UnmapList,
};
pub use sense::{AdditionalSense, Sense, SenseKey, Status};
pub use vpd::{BlockCharacteristics, BlockLimits, Designator, ExtendedInquiry, Page, Provisioning, designators};
pub use wire::TooShort;
