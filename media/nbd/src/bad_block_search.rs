//! Probes for the search of the bad blocks of a Read that failed: each reads its blocks again.
//!
//! A server may name an offset with its error. It is a hint, as for every device ([`find_bad_blocks`](sealblock_block::find_bad_blocks)).

use sealblock_block::{BadBlockCause, BlockProbe, Error, RequestKind};
use sealblock_protocols_nbd::client::ServerError;
use sealblock_units::{Extent, Lba};

use crate::connection::ReplyResult;
use crate::status::{failure, is_about_blocks, text};

/// Probes by Read.
pub(crate) struct Search<R> {
    /// Executes one Read.
    pub read: R,
    /// The block size is 1 << `shift` bytes.
    pub shift: u32,
}

impl<R: AsyncFn(Extent) -> Result<ReplyResult, Error>> BlockProbe for Search<R> {
    type Failed = Vec<ServerError>;

    async fn probe(&self, run: Extent) -> Result<Option<Vec<ServerError>>, Error> {
        match (self.read)(run).await? {
            Ok(_) => Ok(None),
            Err(errors) if is_about_blocks(&errors) => Ok(Some(errors)),
            Err(errors) => Err(failure(RequestKind::Read, Some(run), &errors)),
        }
    }

    fn cause(&self, _: &Vec<ServerError>) -> BadBlockCause {
        BadBlockCause::Media
    }

    async fn hints(&self, _: Extent, failed: &Vec<ServerError>) -> Vec<Lba> {
        named(failed, self.shift).collect()
    }

    async fn named(&self, run: Extent, failed: &Vec<ServerError>) -> Option<Lba> {
        named(failed, self.shift).find(|lba| run.contains(*lba))
    }

    fn describe(&self, failed: &Vec<ServerError>) -> String {
        text(failed)
    }
}

/// The blocks that errors name.
fn named(errors: &[ServerError], shift: u32) -> impl Iterator<Item = Lba> {
    errors.iter().filter_map(move |error| error.offset).map(move |offset| Lba::new(offset >> shift))
}
