use super::*;

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

#[test]
fn parts_are_shorter_and_leave_nothing_out() {
    for blocks in 2..20 {
        let run = extent(100, blocks);
        assert_eq!(halves(run).iter().map(|half| half.len()).sum::<u64>(), blocks);
        assert!(halves(run).iter().all(|half| half.len() < blocks));
        for lba in run.iter() {
            let parts = around(run, lba);
            assert_eq!(parts.iter().map(|part| part.len()).sum::<u64>(), blocks);
            assert_eq!(parts[0], Extent::one(lba));
        }
    }
}

#[test]
fn pieces_between_hints_may_be_empty() {
    let mut runs = Vec::new();
    push_pieces(&mut runs, 5, 5);
    assert!(runs.is_empty());
    push_pieces(&mut runs, 250, 600);
    assert_eq!(
        runs.iter().map(|run| (run.start().get(), run.len())).collect::<Vec<_>>(),
        [(250, 6), (256, 256), (512, 88)]
    );
}
