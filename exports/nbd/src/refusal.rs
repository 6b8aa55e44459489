//! Why a request fails, as the error that answers it: the one place where failures become NBD errors.

use sealblock_block::{Error, Failure};
use sealblock_protocols_nbd::{ErrorCode, Failed};
use sealblock_units::BlockSize;

/// The error for a device's failure. It names the first damaged block, if that is what it is about.
pub(crate) fn of_error(error: &Error, size: BlockSize) -> Failed {
    let first = error.faults().map(|faults| faults.first().lba.get());
    let offset = first.and_then(|lba| lba.checked_mul(size.bytes() as u64));
    Failed { code: code(error.failure()), offset, message: error.failure().to_string() }
}

fn code(failure: &Failure) -> ErrorCode {
    match failure {
        Failure::Integrity(_) | Failure::Miscompare { .. } | Failure::Media { .. } | Failure::Unreachable { .. } => {
            ErrorCode::Io
        }
        Failure::NoSpace { .. } => ErrorCode::NoSpace,
        Failure::ReadOnly => ErrorCode::NotPermitted,
        // ENOTSUP is kept for zeroes that would not be fast ("Error values").
        Failure::Range { .. } | Failure::Limit { .. } | Failure::Absent(_) => ErrorCode::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{Fault, Faults, OperationKind};
    use sealblock_units::Lba;

    #[test]
    fn damage_names_its_first_block() {
        let faults = Faults::new(vec![Fault::media(Lba::new(9)), Fault::media(Lba::new(7))]).unwrap();
        let failed = of_error(&Error::from(faults), BlockSize::B4096);
        assert_eq!((failed.code, failed.offset), (ErrorCode::Io, Some(7 * 4096)));
    }

    #[test]
    fn other_failures_have_their_errors() {
        let reason = String::new;
        for (failure, error) in [
            (Failure::Media { reason: reason() }, ErrorCode::Io),
            (Failure::Unreachable { reason: reason() }, ErrorCode::Io),
            (Failure::NoSpace { reason: reason() }, ErrorCode::NoSpace),
            (Failure::ReadOnly, ErrorCode::NotPermitted),
            (Failure::Absent(OperationKind::Discard), ErrorCode::Invalid),
        ] {
            let failed = of_error(&failure.into(), BlockSize::B4096);
            assert_eq!((failed.code, failed.offset), (error, None));
        }
    }
}
