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
    Anacap, Cmic, Controller, ControllerType, Ctratt, Fcatt, Fuses, Lpa, NvmController, Oacs, Ofcs, Oncs, Sgls, Vwc,
    limit_bytes,
};
pub use lists::{NamespaceId, command_sets, namespace_ids, namespace_list, parse_namespace_list};
pub use namespace::{Dlfeat, Dpc, Dps, Flbas, IndependentNamespace, LbaFormat, Mc, Namespace, Nmic, Nsfeat, Nstat};
pub use nvm_namespace::{ElbaFormat, NamespaceFormat, NamespaceFormatError, NvmNamespace, Pic};

#[cfg(test)]
mod tests;
