//! The buffer of a node that is edited: its header, and the bytes behind that. Leaves and inner nodes have it in common.
//!
//! Invariant: the buffer has the size of a node, so there is always a header.

use zerocopy::{FromBytes, IntoBytes};

use crate::error::EditError;
use crate::node::{HEADER_BYTES, Header};
use crate::superblock::MAX_NODE_BYTES;

/// The buffer of a node.
#[derive(Debug)]
pub struct NodeBuffer<'a> {
    bytes: &'a mut [u8],
}

impl<'a> NodeBuffer<'a> {
    /// Takes a buffer.
    ///
    /// # Errors
    /// If no node has its size.
    pub(crate) fn new(bytes: &'a mut [u8]) -> Result<NodeBuffer<'a>, EditError> {
        let is_size = (HEADER_BYTES..=MAX_NODE_BYTES as usize).contains(&bytes.len());
        if is_size { Ok(NodeBuffer { bytes }) } else { Err(EditError::NodeBytes(bytes.len())) }
    }

    /// Makes it an empty node with this header.
    pub(crate) fn clear(&mut self, header: &Header) {
        self.bytes.fill(0);
        self.bytes[..HEADER_BYTES].copy_from_slice(Header { nritems: 0.into(), ..*header }.as_bytes());
    }

    /// All its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// The header.
    pub fn header(&self) -> &Header {
        Header::ref_from_prefix(self.bytes).expect("a node has a header").0
    }

    /// Gives it another header. Its level and count stay.
    pub(crate) fn set_header(&mut self, header: &Header) {
        let Header { level, nritems, .. } = *self.header();
        let header = Header { level, nritems, ..*header };
        self.bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    }

    /// The number of items or pointers.
    pub fn len(&self) -> usize {
        self.header().nritems.get() as usize
    }

    /// True if it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn set_len(&mut self, count: usize) {
        let header = Header::mut_from_prefix(self.bytes).expect("a node has a header").0;
        header.nritems = (count as u32).into();
    }

    /// The bytes behind the header.
    pub(crate) fn body(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..]
    }

    pub(crate) fn body_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER_BYTES..]
    }
}
