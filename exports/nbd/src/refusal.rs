//! Why a request fails, as its error reply: the one place where errors of devices become NBD errors.

use sealblock_block::{Error, ErrorKind};
use sealblock_protocols_nbd::{ErrorCode, ErrorReply};
use sealblock_units::BlockSize;

/// Returns the error reply for a device's error, with the offset of the first bad block if it is about one.
pub(crate) fn of_error(error: &Error, size: BlockSize) -> ErrorReply {
    let first = error.bad_blocks().map(|bad_blocks| bad_blocks.first().lba.get());
    let offset = first.and_then(|lba| lba.checked_mul(size.bytes() as u64));
    ErrorReply { code: code(error.kind()), offset, message: error.kind().to_string() }
}

fn code(kind: &ErrorKind) -> ErrorCode {
    match kind {
        ErrorKind::Integrity(_)
        | ErrorKind::Miscompare { .. }
        | ErrorKind::Media { .. }
        | ErrorKind::Unreachable { .. } => ErrorCode::Io,
        ErrorKind::NoSpace { .. } => ErrorCode::NoSpace,
        ErrorKind::ReadOnly => ErrorCode::NotPermitted,
        // ENOTSUP is reserved for zeroes that would not be fast ("Error values").
        ErrorKind::Range { .. } | ErrorKind::Limit { .. } | ErrorKind::Absent(_) => ErrorCode::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{BadBlock, BadBlocks, RequestKind};
    use sealblock_units::Lba;

    #[test]
    fn damage_names_its_first_block() {
        let bad_blocks = BadBlocks::new(vec![BadBlock::media(Lba::new(9)), BadBlock::media(Lba::new(7))]).unwrap();
        let reply = of_error(&Error::from(bad_blocks), BlockSize::B4096);
        assert_eq!((reply.code, reply.offset), (ErrorCode::Io, Some(7 * 4096)));
    }

    #[test]
    fn other_failures_have_their_errors() {
        let reason = String::new;
        for (kind, error) in [
            (ErrorKind::Media { reason: reason() }, ErrorCode::Io),
            (ErrorKind::Unreachable { reason: reason() }, ErrorCode::Io),
            (ErrorKind::NoSpace { reason: reason() }, ErrorCode::NoSpace),
            (ErrorKind::ReadOnly, ErrorCode::NotPermitted),
            (ErrorKind::Absent(RequestKind::Discard), ErrorCode::Invalid),
        ] {
            let reply = of_error(&kind.into(), BlockSize::B4096);
            assert_eq!((reply.code, reply.offset), (error, None));
        }
    }
}
