//! The reply to a command, and cutting out the part of a page that a host requested.

use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme_tcp::Payload;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::model::command_error::CommandError;

/// The maximum length of a reply, in bytes.
pub(crate) const MAX_REPLY_BYTES: usize = 1 << 20;

/// The reply to a command that succeeds.
pub(crate) enum Reply {
    /// This result.
    Done(u64),
    /// Data for the host, and this result.
    Data(Payload, u64),
}

/// Returns `requested` bytes for the host: `page`, followed by zeroes.
pub(crate) fn cut(page: &[u8], host_buffer_bytes: usize, requested: u64) -> Result<Reply, CommandError> {
    let requested = usize::try_from(requested)
        .ok()
        .filter(|&requested| requested <= host_buffer_bytes && requested <= MAX_REPLY_BYTES);
    let requested = requested.ok_or(StatusCode::DATA_SGL_LENGTH_INVALID)?;
    let page = &page[..page.len().min(requested)];
    let mut slices = vec![Slice::copy_from(page)];
    ZEROES.with(|zeroes| {
        let mut left = requested - page.len();
        while left > 0 {
            let len = left.min(zeroes.len());
            slices.push(zeroes.slice(..len));
            left -= len;
        }
    });
    Ok(Reply::Data(Payload::new(slices), 0))
}

thread_local! {
    /// The zeroes after the ends of pages. All replies share them: a host that requests long pages and never receives
    /// them must not make the target hold memory for them.
    static ZEROES: Slice = Buffer::zeroed(32 << 10).freeze();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(page: &[u8], host_buffer_bytes: usize, requested: u64) -> Option<Payload> {
        match cut(page, host_buffer_bytes, requested) {
            Ok(Reply::Data(data, 0)) => Some(data),
            Ok(_) => panic!("a page is data"),
            Err(_) => None,
        }
    }

    #[test]
    fn a_page_is_cut_or_followed_by_zeroes_that_all_replies_share() {
        let bytes = |data: &Payload| data.slices().iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
        assert_eq!(bytes(&answer(&[7; 12], 64, 8).unwrap()), [7; 8]);
        let long = answer(&[7; 12], 1 << 20, 100_000).unwrap();
        assert_eq!(bytes(&long), [vec![7; 12], vec![0; 99_988]].concat());
        let other = answer(&[8; 4], 1 << 20, 64).unwrap();
        assert_eq!(long.slices()[1].as_ptr(), other.slices()[1].as_ptr());
        assert!(answer(&[7; 12], 4, 8).is_none(), "more than the host has room for");
        assert!(answer(&[7; 12], usize::MAX, (1 << 20) + 4).is_none(), "more than is ever sent");
    }
}
