//! Hostile peers against a whole NVMe/TCP target, from outside its process.
//!
//! An attack is a function over blocking sockets that fails when the target deviates from the specification. During
//! each attack a bystander does checked I/O. Afterwards the target must still run, must not have exceeded the memory
//! that its limits allow, and must have closed its descriptors. The target runs in its own process, so that these can
//! be measured from outside.
//!
//! [`host`] tests the other direction: our host device, in this process, behind a proxy that corrupts a correct
//! target's PDUs.
//!
//! [`restart`] has the host use a real server that is killed again and again.
//!
//! The bystander must make progress and never wait long; its operations per second with and without the attack are only
//! printed, as a ratio.

#![allow(missing_docs, reason = "the fields of raw PDUs and answers speak for themselves")]

pub mod attacks;
pub mod bystander;
pub mod fairness;
pub mod floods;
pub mod formats;
pub mod host;
pub mod oracle;
pub mod process;
pub mod proxy;
pub mod restart;
pub mod served;
pub mod suite;
pub mod wire;
pub mod writes;
