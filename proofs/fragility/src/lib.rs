//! What each part of a protected volume costs when it is damaged.
//!
//! A [`specimen`] is a volume in a known state, with every content its blocks ever had. A [`trial`] damages one part of it
//! ([`damage`]), opens it for reading and then for writing, reads every block, writes some, and opens it again. Allowed is the
//! loss of the blocks whose every map entry, or whose data, lay in the damaged bytes ([`places`]); not a refusal, not bytes that
//! no client wrote, and no older content but where the table of [`report`] names it.
//!
//! Nothing here knows where a volume keeps what: regions come from its own layout, map entries are found by a scan.

pub mod damage;
pub mod life;
pub mod look;
pub mod medium;
pub mod model;
pub mod places;
pub mod report;
pub mod scan;
pub mod specimen;
pub mod trial;
