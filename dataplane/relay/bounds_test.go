package relay

import (
	"io"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPipesAreBounded: after a rush of relays so many pipes are kept, none larger than what a splice may move.
func TestPipesAreBounded(t *testing.T) {
	inode := func(p *pipe) uint64 { // a number may be another's later
		var st unix.Stat_t
		if unix.Fstat(p.r, &st) != nil {
			return 0
		}
		return st.Ino
	}
	var all []*pipe
	was := map[*pipe]uint64{}
	for range 64 + 6 {
		p, err := takePipe()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
		was[p] = inode(p)
	}
	for _, p := range all {
		if n, err := unix.FcntlInt(uintptr(p.w), unix.F_GETPIPE_SZ, 0); err != nil || n > 1<<20 {
			t.Errorf("a pipe of %d bytes, %v", n, err)
		}
		p.put()
	}
	kept := map[*pipe]bool{}
	for range len(pipes) {
		p := <-pipes
		kept[p] = true
		pipes <- p
	}
	if len(kept) != 64 {
		t.Errorf("%d of %d pipes are kept", len(kept), len(all))
	}
	for _, p := range all {
		if open := inode(p) == was[p]; open != kept[p] {
			t.Errorf("pipe %d: kept %v, open %v", p.r, kept[p], open)
		}
	}
}

// TestAlertIsBounded: a hop that takes nothing, and then breaks, is not waited for: the alert is for whoever reads.
func TestAlertIsBounded(t *testing.T) {
	for _, kind := range []string{"tls std", "tls own"} {
		b := newBed(t, kind, nil)
		for buf := make([]byte, 256<<10); ; { // the peer never reads
			b.client.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			if _, err := b.client.Write(buf); err != nil {
				break
			}
		}
		b.server.tcp.Write([]byte{23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0})
		if r := b.result(t); r.First != B {
			t.Errorf("%s: %+v", kind, r)
		}
		if _, err := io.Copy(io.Discard, b.client); err == nil {
			t.Errorf("%s: the client sees an orderly end", kind)
		}
	}
}
