//! Hostile peers against a whole NVMe/TCP target, from outside its process.
//!
//! An attack is a function over blocking sockets that fails when the target answers other than the specification says.
//! Beside each attack a neighbour does checked I/O, and after it the target must be alive, must not have held more memory
//! than its limits allow at any moment, and must have given its descriptors back. The target is a process of its own, so
//! that these can be seen from outside.
//!
//! The other direction is in [`host`]: our host device, in this process, behind a proxy that spoils a good target's answers.
//!
//! [`restart`] has the host work at a real server that is killed again and again.
//!
//! Of speed it is asserted that the neighbour gets something done and never waits long; its operations with and without the
//! attack are printed as a ratio.

#![allow(missing_docs, reason = "the fields of raw PDUs and answers speak for themselves")]

pub mod attacks;
pub mod bystander;
pub mod formats;
pub mod host;
pub mod oracle;
pub mod process;
pub mod proxy;
pub mod random;
pub mod restart;
pub mod served;
pub mod suite;
pub mod wire;
pub mod writes;
