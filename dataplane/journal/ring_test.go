package journal

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode"

	"aether/dataplane/model"
)

// of are the rules of the entries of a pod, in the order given.
func of(es []Entry, pod string) (out []string) {
	for _, e := range es {
		if e.Pod == pod {
			out = append(out, e.Rule)
		}
	}
	return out
}

// TestAPodsEntriesStay: beside a pod that is refused without end, another's failures and successes are all there, in order of time.
func TestAPodsEntriesStay(t *testing.T) {
	r := NewRing(64)
	at := time.Unix(0, 0)
	var want []string
	for i := range 10000 {
		at = at.Add(time.Millisecond)
		r.Ended(&Entry{At: at, Namespace: "bad", Pod: "evil", Dir: model.Captured, Action: "refuse", Status: 421})
		if i%1000 == 0 {
			at = at.Add(time.Millisecond)
			want = append([]string{fmt.Sprint(i)}, want...)
			r.Ended(&Entry{At: at, Namespace: "shop", Pod: "web", Dir: model.Captured, Action: "forward", Status: 503, Rule: fmt.Sprint(i)})
		}
	}
	for _, bad := range []bool{true, false} {
		got := r.Last(1000, bad)
		if s := of(got, "web"); fmt.Sprint(s) != fmt.Sprint(want) {
			t.Errorf("bad %v: %v of web's failures, want %v", bad, s, want)
		}
		if len(got) != 64 {
			t.Errorf("bad %v: %d entries", bad, len(got))
		}
		for i := 1; i < len(got); i++ {
			if got[i].At.After(got[i-1].At) {
				t.Errorf("bad %v: entry %d is newer than the one before it", bad, i)
			}
		}
	}
	// What callers are refused at a pod does not hide what it fails at itself.
	for range 1000 {
		at = at.Add(time.Millisecond)
		r.Ended(&Entry{At: at, Namespace: "shop", Pod: "web", Dir: model.Inbound, Action: "refuse", Status: 403, Rule: "policy"})
	}
	kept := 0
	for _, e := range r.Last(1000, true) {
		if e.Pod == "web" && e.Dir == model.Captured {
			kept++
		}
	}
	if kept != len(want) {
		t.Errorf("%d of web's own failures beside its refusals of callers, want %d", kept, len(want))
	}
}

// TestShares: whatever pods do, each has its newest entries here, of those as many as it
// has told, or its share; all together are as many as there is room for, in the order
// in which they were told.
func TestShares(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		n, pods := 1+random.IntN(40), 1+random.IntN(50)
		r := NewRing(n)
		told := map[string]int{}
		at := time.Unix(0, 0)
		total := 0
		for range random.IntN(400) {
			pod := fmt.Sprint(int(float64(pods) * random.Float64() * random.Float64())) // some tell more than others
			for range 1 + random.IntN(1+random.IntN(30)) {
				at = at.Add(time.Millisecond)
				r.Ended(&Entry{At: at, Pod: pod, Rule: fmt.Sprint(told[pod])})
				told[pod]++
				total++
			}
		}
		all := r.Last(1000, false)
		if len(all) != min(n, total) {
			t.Fatalf("%d entries of %d in a ring of %d", len(all), total, n)
		}
		for i := 1; i < len(all); i++ {
			if !all[i].At.Before(all[i-1].At) {
				t.Fatalf("entry %d is not older than the one before it", i)
			}
		}
		for pod, k := range told {
			got := of(all, pod)
			if share := n / len(told); len(got) < min(k, share) {
				t.Fatalf("pod %s has %d of %d entries in a ring of %d for %d pods", pod, len(got), k, n, len(told))
			}
			for i, rule := range got {
				if rule != fmt.Sprint(k-1-i) {
					t.Fatalf("pod %s has %v, which are not its newest of %d", pod, got, k)
				}
			}
		}
		if len(r.all.holders) != len(r.all.of) || len(r.all.holders)+len(r.all.free) > n+1 {
			t.Fatalf("%d holders, %d by name and %d free in a ring of %d", len(r.all.holders), len(r.all.of), len(r.all.free), n)
		}
	}
}

// TestStaleEntriesMakeRoom: pods that are gone do not keep a share for ever.
func TestStaleEntriesMakeRoom(t *testing.T) {
	r := NewRing(16)
	at := time.Unix(0, 0)
	for i := range 16 {
		r.Ended(&Entry{At: at, Pod: fmt.Sprint("job-", i)})
	}
	for i := range 16 {
		r.Ended(&Entry{At: at.Add(staleAfter - 1), Pod: "web", Rule: fmt.Sprint(i)})
	}
	if got := len(of(r.Last(16, false), "web")); got != 1 {
		t.Errorf("%d entries of web beside 15 that are not old, want 1", got)
	}
	for i := range 16 {
		r.Ended(&Entry{At: at.Add(staleAfter), Pod: "web", Rule: fmt.Sprint(i)})
	}
	if got := of(r.Last(16, false), "web"); len(got) != 16 {
		t.Errorf("%d entries of web beside jobs of an hour ago, want all 16", len(got))
	}
}

// TestManyPodsAllocateNothing: that pods make room for each other costs no memory.
func TestManyPodsAllocateNothing(t *testing.T) {
	r := NewRing(32)
	entries := make([]Entry, 100)
	for i := range entries {
		entries[i] = Entry{Pod: fmt.Sprint(i), Action: "refuse"}
	}
	i := 0
	tell := func() {
		r.Ended(&entries[i%len(entries)])
		i++
	}
	for range 1000 {
		tell()
	}
	if n := testing.AllocsPerRun(5000, tell); n != 0 {
		t.Errorf("%v allocations an entry, want 0", n)
	}
}

func BenchmarkRing(b *testing.B) {
	for _, pods := range []int{1, 30, 250, 1000} {
		b.Run(fmt.Sprint(pods), func(b *testing.B) {
			r := NewRing(512)
			entries := make([]Entry, pods)
			for i := range entries {
				entries[i] = Entry{Namespace: "shop", Pod: fmt.Sprint("web-7d4b9c-", i), Action: "forward", Status: 200}
			}
			for i := 0; b.Loop(); i++ {
				r.Ended(&entries[i%pods])
			}
		})
	}
}

// TestStringIsPlain: of what peers send nothing is in a line that a terminal acts upon, and an entry is one line.
func TestStringIsPlain(t *testing.T) {
	for r := rune(0); r <= 0x2fff; r++ {
		hostile := "a" + string(r) + "b"
		e := Entry{At: time.Unix(0, 0), Request: true, Namespace: "shop", Workload: "web", Rule: hostile, Backend: hostile, Peer: hostile, Socket: hostile, Cause: hostile}
		e.Host.SetString(hostile)
		e.Method.SetString(hostile)
		e.Path.SetString("/" + hostile)
		e.Outcome.SetString(hostile)
		if s := e.String(); strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%U: %q", r, s)
		}
	}
	e := Entry{Request: true}
	e.Path.SetString("/\x9b2J\xff" + strings.Repeat("\u00e9", 60)) // cut in the midst of a rune
	if s := e.String(); !strings.Contains(s, `/\ufffd2J\ufffd`) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("%q", s)
	}
}
