//! Information about exports, from replies to options.

use crate::client::violation::{Violation, printable};
use crate::identity::Identity;
use crate::reply::ReplyStyle;
use crate::wire::FieldReader;
use crate::wire::{STRING_BYTES, info, transmission};

/// An export in the reply to LIST.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedExport {
    /// Its name. Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Description for people, possibly empty, without characters that are not printable.
    pub description: String,
}

impl ListedExport {
    /// Reads NBD_REP_SERVER.
    pub(super) fn read(data: &[u8]) -> Option<ListedExport> {
        let mut fields = FieldReader(data);
        let name = fields.string().filter(|name| name.len() <= STRING_BYTES)?;
        let name = String::from_utf8_lossy(name).into_owned();
        Some(ListedExport { name, description: printable(fields.0) })
    }
}

/// Block sizes in bytes ("Size constraints").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it; a power of two.
    pub smallest: u32,
    /// The preferred block size.
    pub best: u32,
    /// Longest payload.
    pub largest: u32,
}

impl Default for BlockSizes {
    /// The protocol's defaults, for a server that sends no block sizes.
    fn default() -> BlockSizes {
        BlockSizes { smallest: 1, best: 4096, largest: crate::config::MAX_PAYLOAD_BYTES }
    }
}

impl BlockSizes {
    fn read(fields: &mut FieldReader<'_>) -> Option<Result<BlockSizes, Violation>> {
        let (smallest, best, largest) = (fields.u32()?, fields.u32()?, fields.u32()?);
        fields.end()?;
        let fits = |largest: u32| largest == u32::MAX || largest.is_multiple_of(smallest);
        let good = smallest.is_power_of_two() && best.is_power_of_two() && best >= smallest && largest >= smallest;
        let sizes = BlockSizes { smallest, best, largest };
        Some(if good && fits(largest) { Ok(sizes) } else { Err(Violation::BlockSizes(smallest, best, largest)) })
    }
}

/// Information about an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    /// Its name as the server reports it, if it does.
    pub name: Option<String>,
    /// Description for people, possibly empty, without characters that are not printable.
    pub description: String,
    /// Bytes of data.
    pub size_bytes: u64,
    /// Transmission flags: [`crate::wire::transmission`].
    pub flags: u16,
    /// Block sizes; the protocol's defaults for a server that sends none.
    pub sizes: BlockSizes,
    /// Form of the replies.
    pub style: ReplyStyle,
    /// Identifier of `base:allocation` in replies, if it was chosen.
    pub context: Option<u32>,
    /// True if the server executes nothing of this client's older sessions ([`crate::SessionName`]) any more once it executes requests of
    /// this one.
    pub is_fenced: bool,
    /// Why blocks may be older than what was written, as bits; 0 if they are current, or if the server does not know the context.
    pub older: u8,
    /// What it is, as far as the server says it.
    pub identity: Identity,
}

impl ExportInfo {
    /// True if a transmission flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn is_extended(&self) -> bool {
        self.style == ReplyStyle::Extended
    }
}

/// Information from replies to INFO or GO so far.
#[derive(Default, Debug)]
pub(super) struct ExportReply {
    name: Option<String>,
    description: String,
    export: Option<(u64, u16)>,
    sizes: BlockSizes,
}

impl ExportReply {
    /// Reads one NBD_REP_INFO. Unknown types are ignored ("Option reply types").
    pub(super) fn take(&mut self, data: &[u8]) -> Option<Result<(), Violation>> {
        let mut fields = FieldReader(data);
        match fields.u16()? {
            info::EXPORT => {
                self.export = Some((fields.u64()?, fields.u16()?));
                fields.end()?;
            }
            info::NAME => self.name = Some(String::from_utf8_lossy(fields.0).into_owned()),
            info::DESCRIPTION => self.description = printable(fields.0),
            info::BLOCK_SIZE => match BlockSizes::read(&mut fields)? {
                Ok(sizes) => self.sizes = sizes,
                Err(violation) => return Some(Err(violation)),
            },
            _ => {}
        }
        Some(Ok(()))
    }

    /// The information, once the option is acknowledged.
    pub(super) fn finish(
        self,
        style: ReplyStyle,
        context: Option<u32>,
        is_fenced: bool,
        older: u8,
        identity: Identity,
    ) -> Result<ExportInfo, Violation> {
        let (size_bytes, flags) = self.export.ok_or(Violation::NoSize)?;
        // DF means nothing without structured replies.
        let flags = if style == ReplyStyle::Simple { flags & !transmission::SEND_DF } else { flags };
        let ExportReply { name, description, sizes, .. } = self;
        Ok(ExportInfo { name, description, size_bytes, flags, sizes, style, context, is_fenced, older, identity })
    }
}
