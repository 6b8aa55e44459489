//! The field's bits, the table's numbers, and the Do Not Retry policy.

use super::*;

#[test]
fn the_parts_of_a_status_stand_in_their_bits() {
    let status = StatusCode::new(2, 0x85).status().with_dnr(false);
    assert_eq!(status.bits(), 0x0285);
    assert_eq!(status.with_retry_delay(3).bits(), 0x1A85);
    assert_eq!(status.with_more(true).bits(), 0x2285);
    assert_eq!(status.with_dnr(true).bits(), 0x4285);
    assert_eq!(status.with_dnr(true).with_dnr(false), status);
    assert_eq!(status.with_more(true).with_more(false).with_retry_delay(2).with_retry_delay(0), status);
    assert_eq!(Status::from_bits(0xFFFF).bits(), 0x7FFF);
    assert_eq!((Status::from_bits(0x7FFF).retry_delay(), Status::from_bits(0x7FFF).code().get()), (3, 0x7FF));
}

/// What a Linux host reports for injected damage, as `error 17026 (0x4282)`.
#[test]
fn a_guard_error_is_the_number_that_linux_prints() {
    assert_eq!(StatusCode::GUARD_CHECK_ERROR.status().bits(), 0x4282);
    assert_eq!(StatusCode::GUARD_CHECK_ERROR.code_type(), StatusCodeType::Media);
}

#[test]
fn damaged_blocks_are_not_tried_again_and_what_time_may_cure_is() {
    for code in [
        StatusCode::UNRECOVERED_READ_ERROR,
        StatusCode::GUARD_CHECK_ERROR,
        StatusCode::APPLICATION_TAG_CHECK_ERROR,
        StatusCode::REFERENCE_TAG_CHECK_ERROR,
        StatusCode::STORAGE_TAG_CHECK_ERROR,
        StatusCode::COMPARE_FAILURE,
        StatusCode::INVALID_FIELD,
        StatusCode::LBA_OUT_OF_RANGE,
    ] {
        assert!(code.status().do_not_retry(), "{code}");
    }
    for code in [
        StatusCode::SUCCESS,
        StatusCode::NAMESPACE_NOT_READY,
        StatusCode::INTERNAL_ERROR,
        StatusCode::ANA_TRANSITION,
        StatusCode::TRANSIENT_TRANSPORT_ERROR,
        StatusCode::new(7, 1),
    ] {
        assert!(!code.status().do_not_retry(), "{code}");
    }
}

#[test]
fn named_codes_ascend_and_have_names() {
    assert!(StatusCode::NAMED.windows(2).all(|pair| pair[0] < pair[1]));
    assert!(StatusCode::NAMED.iter().all(|code| code.name().is_some() && code.get() < 0x800));
    assert_eq!(StatusCode::new(1, 0x81).name(), Some("Connect Controller Busy"));
    assert_eq!(StatusCode::new(1, 0x81).io_name(), Some("Invalid Protection Information"));
    assert_eq!(StatusCode::new(2, 0x82).io_name(), Some("End-to-end Guard Check Error"));
}

#[test]
fn unknown_codes_are_reported_by_number() {
    let status = Status::from_bits(0x67FF);
    assert_eq!(status.to_string(), "status 0x7ff, do not retry, more in the error log");
    assert_eq!(Status::SUCCESS.to_string(), "Successful Completion (0x000)");
    assert_eq!(status.code().code_type(), StatusCodeType::Vendor);
}
