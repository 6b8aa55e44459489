//! Twin tests of the rule parser, and properties of it.

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Result<Rules, RuleError> {
    text.parse()
}

fn rule_of(fault: Fault, first: u64, last: u64, parts: u32) -> Rule {
    Rule { fault, span: Span { first, last }, chance: Chance::from_parts(parts).unwrap() }
}

const ALWAYS: u32 = 1_000_000_000;

#[test]
fn the_example_reads_as_it_says() {
    let rules = parse("seed=7;read-error@100..200;flip@5;lost-write%0.01;delay=10ms@0..99").unwrap();
    assert_eq!(rules.seed, 7);
    let expected = [
        rule_of(Fault::ReadError, 100, 200, ALWAYS),
        rule_of(Fault::Flip, 5, 5, ALWAYS),
        rule_of(Fault::LostWrite, 0, u64::MAX, 100_000),
        rule_of(Fault::Delay(Duration::from_millis(10)), 0, 99, ALWAYS),
    ];
    assert_eq!(rules.rules, expected);
}

#[test]
fn marks_come_in_any_order_and_spaces_stand_between_rules() {
    let one = parse("flip@5..6%12.5 ; delay=1s%50").unwrap();
    assert_eq!(one, parse("flip%12.5@5..6;delay%50=1s").unwrap());
    assert_eq!(one.seed, 0);
    assert_eq!(one.rules[0], rule_of(Fault::Flip, 5, 6, 125_000_000));
    for (fault, _) in Fault::WITHOUT_TIME {
        assert_eq!(parse(fault.name()).unwrap().rules[0].fault, fault);
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let cases = [
        ("", RuleError::Empty),
        ("flip;;flip", RuleError::Empty),
        ("flip;", RuleError::Empty),
        ("flap", RuleError::Name("flap".to_owned())),
        ("@5", RuleError::Name(String::new())),
        ("seed", RuleError::Name("seed".to_owned())),
        ("seed=", RuleError::Seed(String::new())),
        ("seed=18446744073709551616", RuleError::Seed("18446744073709551616".to_owned())),
        ("seed=+1", RuleError::Seed("+1".to_owned())),
        ("seed=1;seed=1", RuleError::Twice { what: "the seed" }),
        ("flip@", RuleError::Span(String::new())),
        ("flip@9..3", RuleError::Span("9..3".to_owned())),
        ("flip@1..2..3", RuleError::Span("1..2..3".to_owned())),
        ("flip@-1", RuleError::Span("-1".to_owned())),
        ("flip@1@2", RuleError::Twice { what: "the place of a rule" }),
        ("flip%", RuleError::Chance(String::new())),
        ("flip%101", RuleError::Chance("101".to_owned())),
        ("flip%100.0000001", RuleError::Chance("100.0000001".to_owned())),
        ("flip%1.", RuleError::Chance("1.".to_owned())),
        ("flip%0.00000001", RuleError::Chance("0.00000001".to_owned())),
        ("flip%1e1", RuleError::Chance("1e1".to_owned())),
        ("flip%1%1", RuleError::Twice { what: "the chance of a rule" }),
        ("flip=3", RuleError::Misplaced { name: "flip", mark: '=' }),
        ("flush-error@3", RuleError::Misplaced { name: "flush-error", mark: '@' }),
        ("delay", RuleError::Delay(String::new())),
        ("delay=10", RuleError::Delay("10".to_owned())),
        ("delay=ms", RuleError::Delay("ms".to_owned())),
        ("delay=3601s", RuleError::Delay("3601s".to_owned())),
        ("delay=18446744073709551615s", RuleError::Delay("18446744073709551615s".to_owned())),
        ("flip@5\u{e4}", RuleError::Span("5\u{e4}".to_owned())),
    ];
    for (text, error) in cases {
        assert_eq!(parse(text), Err(error), "{text}");
    }
    assert!(parse("delay=3600s").is_ok() && parse("flip%100").is_ok() && parse("flip%0").is_ok());
}

#[test]
fn length_and_number_are_limited() {
    assert!(parse(&["flip"; RULES_LIMIT].join(";")).is_ok());
    let many = ["flip"; RULES_LIMIT + 1].join(";");
    assert_eq!(parse(&many), Err(RuleError::TooMany { rules: RULES_LIMIT + 1 }));
    let long = format!("flip{}", " ".repeat(TEXT_LIMIT_BYTES));
    assert_eq!(parse(&long), Err(RuleError::TooLong { bytes: TEXT_LIMIT_BYTES + 4 }));
    assert!(parse(&long[..TEXT_LIMIT_BYTES]).is_ok());
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let fault = prop_oneof![
        (0..Fault::WITHOUT_TIME.len()).prop_map(|index| Fault::WITHOUT_TIME[index].0),
        (0..=3_600_000_000_u64).prop_map(|us| Fault::Delay(Duration::from_micros(us))),
    ];
    (fault, any::<u64>(), any::<u64>(), 0..=ALWAYS).prop_map(|(fault, a, b, parts)| {
        let span = if fault.is_of_flush() { Span::ALL } else { Span { first: a.min(b), last: a.max(b) } };
        Rule { fault, span, chance: Chance::from_parts(parts).unwrap() }
    })
}

proptest! {
    #[test]
    fn rules_survive_writing_and_reading(seed: u64, rules in proptest::collection::vec(any_rule(), 0..8)) {
        let rules = Rules { seed, rules };
        prop_assert_eq!(parse(&rules.to_string()), Ok(rules));
    }

    #[test]
    fn no_text_causes_a_panic(text in ".{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_text_of_the_right_letters_causes_a_panic(text in "(flip|delay|seed|lost-write|[=@%;.]|[0-9]{1,21}|\\.\\.|ms|us|s|\u{e4}){0,20}") {
        if let Ok(rules) = parse(&text) {
            prop_assert_eq!(parse(&rules.to_string()), Ok(rules));
        }
    }
}
