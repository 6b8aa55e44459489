//! Structures of the NVM Express base and NVM command set specifications.
//!
//! Pure: bytes in, values out, and back. No I/O, no sockets, no clock. Clauses are named by their titles, "Base" for the
//! NVM Express Base specification 2.1 and "NVM" for the NVM Command Set specification 1.1, because titles outlive the
//! numbers from one revision to the next.
//!
//! Invariants: no input makes anything here panic; everything on the wire is little-endian; 0's-based counts exist only
//! between a decoder and its encoder; what is refused is refused with the status code that answers it.

pub mod admin;
pub mod command;
pub mod completion;
pub mod error;
pub mod extensions;
pub mod fabrics;
pub mod features;
pub mod identify {
    //! The structures that Identify returns: built by a target, parsed by a host (Base, "Identify command"; NVM, "Identify
    //! Command").
    //!
    //! Each structure of 4096 bytes is a plain struct with `encode` and `decode`, drawn as the table of its clause. The
    //! fields carry the specification's mnemonics.

    mod controller;
    mod lists;
    mod namespace;
    mod nvm_namespace;

    pub use controller::{
        Cmic, Controller, ControllerType, Ctratt, Fuses, Lpa, NvmController, Oacs, Ofcs, Oncs, Sgls, Vwc, limit_bytes,
    };
    pub use lists::{NamespaceId, command_sets, namespace_ids, namespace_list, parse_namespace_list};
    pub use namespace::{Dlfeat, Dpc, Dps, Flbas, IndependentNamespace, LbaFormat, Mc, Namespace, Nmic, Nstat};
    pub use nvm_namespace::{ElbaFormat, NamespaceFormat, NamespaceFormatError, NvmNamespace, Pic};

    #[cfg(test)]
    mod tests;
}
pub mod logs;
pub mod nqn;
pub mod nvm;
pub mod opcodes;
pub mod registers;
pub mod sgl;
pub mod status;
pub mod wire;

pub use command::{Command, Fuse, NSID_ALL};
pub use completion::Completion;
pub use error::{FieldLocation, Invalid};
pub use opcodes::{AdminOpcode, Direction, FABRICS_OPCODE, FabricsType, IoOpcode};
pub use sgl::{DataPointer, SglDescriptor, SglError};
pub use status::{Status, StatusCode, StatusCodeType};
pub use wire::{Ascii, Count8, Count16, TooShort};
