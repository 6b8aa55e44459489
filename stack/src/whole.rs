//! All bytes of a target, where its end may lie within a block: what `copy` and `compare` read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use futures_util::future::LocalBoxFuture;
use sealblock_block::Device;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockSize, Extent};

use crate::error::{Cause, StackError};
use crate::failures::device_error;
use crate::open::{open, open_past_damage};
use crate::opened::held::Access;
use crate::opened::out_of_sync::mark;
use crate::opened::{OpenTarget, data_of};
use crate::path::files::RAW_FILE;
use crate::path::{PlainFilePolicy, open_file};
use crate::target::TargetName;

/// Less than a block of any size follows the last whole block; bytes by which a file grows meanwhile are not read.
const MAX_REST_BYTES: u64 = 4095;

/// An open target, and of a plain file the bytes behind its last whole block.
pub struct ByteView {
    /// The whole blocks.
    pub opened: OpenTarget,
    rest: Slice,
}

impl ByteView {
    /// Opens a target for reading. A plain file is one here by its bare path, too.
    ///
    /// # Errors
    /// Says what could not be opened and why.
    pub fn open(target: &TargetName, access: Access) -> LocalBoxFuture<'_, Result<ByteView, StackError>> {
        ByteView::open_by(target, access, open)
    }

    /// The same for reading past what is lost: an NBD export in blocks as small as its server takes them.
    ///
    /// # Errors
    /// As [`ByteView::open`].
    pub fn open_past_damage(target: &TargetName, access: Access) -> LocalBoxFuture<'_, Result<ByteView, StackError>> {
        ByteView::open_by(target, access, open_past_damage)
    }

    fn open_by<'a>(
        target: &'a TargetName,
        access: Access,
        open: fn(&'a TargetName, Access) -> LocalBoxFuture<'a, Result<OpenTarget, StackError>>,
    ) -> LocalBoxFuture<'a, Result<ByteView, StackError>> {
        Box::pin(async move {
            let opened = match target {
                TargetName::File(path) => mark(open_file(target, path, access, PlainFilePolicy::Taken).await?).await,
                _ => open(target, access).await?,
            };
            let rest = match target.path().filter(|_| opened.info.kind == RAW_FILE) {
                Some(path) => rest_of(path, opened.device.geometry().capacity_bytes())
                    .map_err(|error| StackError::io("read", &error).on(target))?,
                None => Slice::empty(),
            };
            Ok(ByteView { opened, rest })
        })
    }

    /// The whole blocks of an open target.
    pub fn of_blocks(opened: OpenTarget) -> ByteView {
        ByteView { opened, rest: Slice::empty() }
    }

    /// The size of the blocks that numbers in names of the target count: of an NBD export the largest of which it has whole ones, however
    /// it was opened.
    pub fn named_block_size(&self) -> BlockSize {
        let geometry = self.opened.device.geometry();
        let is_whole = geometry.capacity_bytes().is_multiple_of(BlockSize::B4096.bytes() as u64);
        if self.opened.info.export.is_some() && is_whole { BlockSize::B4096 } else { geometry.block_size }
    }

    /// How many bytes there are.
    pub fn len_bytes(&self) -> u64 {
        self.opened.device.geometry().capacity_bytes() + self.rest.len() as u64
    }

    /// Reads `length` bytes from `offset` on, fully checked. The offset begins a block; the end lies anywhere up to
    /// [`ByteView::len_bytes`].
    ///
    /// # Errors
    /// The device's error, with the action `doing`.
    pub fn read<'a>(
        &'a self,
        doing: &'a str,
        offset: u64,
        length: u64,
    ) -> LocalBoxFuture<'a, Result<Slice, StackError>> {
        Box::pin(async move {
            let read =
                async |blocks| self.opened.read(blocks).await.map(data_of).map_err(|error| device_error(doing, &error));
            self.assemble(offset, length, read).await
        })
    }

    /// Whole blocks, read by `read`, and the bytes after the last one.
    pub(crate) async fn assemble(
        &self,
        offset: u64,
        length: u64,
        read: impl AsyncFnOnce(Extent) -> Result<Slice, StackError>,
    ) -> Result<Slice, StackError> {
        let geometry = self.opened.device.geometry();
        let (shift, end) = (geometry.block_size.shift(), geometry.capacity_bytes());
        let blocks = length.min(end.saturating_sub(offset)).div_ceil(geometry.block_size.bytes() as u64);
        let mut data = Slice::empty();
        if blocks > 0 {
            let extent = Extent::from_raw(offset >> shift, blocks);
            data = read(extent.map_err(|error| StackError::new(Cause::Usage, "read", error))?).await?;
        }
        let length = length as usize;
        if data.len() >= length {
            return Ok(data.slice(..length));
        }
        let mut whole = Buffer::zeroed(length);
        whole[..data.len()].copy_from_slice(&data);
        let from = (offset + data.len() as u64 - end) as usize;
        whole[data.len()..].copy_from_slice(&self.rest[from..from + length - data.len()]);
        Ok(whole.freeze())
    }

    /// Closes the target.
    ///
    /// # Errors
    /// `result`'s, or why it could not be closed.
    pub async fn close<T>(self, result: Result<T, StackError>) -> Result<T, StackError> {
        self.opened.close(result).await
    }
}

/// What a file has behind its last whole block, which ends at `from`.
fn rest_of(path: &Path, from: u64) -> std::io::Result<Slice> {
    let file = File::open(path)?;
    let mut rest = Buffer::zeroed(file.metadata()?.len().saturating_sub(from).min(MAX_REST_BYTES) as usize);
    file.read_exact_at(&mut rest, from)?;
    Ok(rest.freeze())
}
