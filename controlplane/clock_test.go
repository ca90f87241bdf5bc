package controlplane

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane/model"
)

// TestRetainedOverARestart (contract 4.12): a service that is kept when the process ends is kept
// by the next one for the rest of its 90 s, whichever way the clock was set between the
// two: each bubble's clock begins at the same moment. And what was known before the
// start is told to be old.
func TestRetainedOverARestart(t *testing.T) {
	for _, tt := range []struct {
		name          string
		first, second time.Duration // on the clock, when a life begins
	}{
		{"at once", 0, retention / 3},
		{"set back by hours", 5 * time.Hour, 0},
		{"set forward by hours", 0, 5 * time.Hour},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(tt.first)
				w, src := start(t, Config{LastGood: file}, "registry")
				src[0].Report(input.Status{Connected: true})
				rows := batch(t, "pods shop/cart 8080\npods shop/db 5432=tcp")
				src[0].Replace(input.Batch{Tables: input.Tables{Endpoints: rows.Endpoints}})
				w.settled()
				src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: map[model.ServiceName][]model.Endpoint{cart: nil}}})
				w.settled()
				time.Sleep(retention / 3)
				if w.service(cart) == nil {
					t.Fatal("not kept at all")
				}
				w.stop()
			})
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(tt.second)
				began := time.Now()
				w, src := start(t, Config{LastGood: file}, "registry")
				w.settled()
				if s := w.service(cart); s == nil || s.Port(8080) == nil || len(w.endpoints(cart, 8080)) != 0 {
					t.Fatalf("after the restart: %+v", s)
				}
				if r := w.loop.Report(); r.StaleSince == nil || r.StaleSince.After(began) || r.LastGood.AgeMS < 0 {
					t.Errorf("nothing is told to be old: %+v, %+v", r.StaleSince, r.LastGood)
				}
				src[0].Report(input.Status{Connected: true})
				src[0].Replace(input.Batch{Tables: input.Tables{Endpoints: batch(t, "pods shop/db 5432=tcp").Endpoints}}) // which says nothing of cart
				w.settled()
				time.Sleep(time.Until(began.Add(retention*2/3)) - time.Second)
				synctest.Wait()
				if w.service(cart) == nil {
					t.Error("gone before its time")
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if w.service(cart) != nil {
					t.Error("kept for longer")
				}
			})
		})
	}
}

// TestProblemAges: a problem has the age of its words. It keeps it while its place moves in the file and others come and
// go, and over a restart if its object stays as it was; one that was mended and comes again is new.
func TestProblemAges(t *testing.T) {
	file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
	const flawed, stayed = "HTTPRoute shop/r", "HTTPFilter shop/f"
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{LastGood: file}, "files")
		began := time.Now()
		say := func(problems ...model.Problem) {
			b := input.Batch{Tables: input.Tables{Problems: map[string][]model.Problem{flawed: nil, stayed: nil}}}
			for _, p := range problems {
				b.Problems[p.Object] = append(b.Problems[p.Object], p)
			}
			src[0].Apply(b)
			w.settled()
		}
		ages := func(when string, want map[string]time.Duration) {
			t.Helper()
			is := map[string]time.Duration{}
			for _, p := range w.loop.State().Problems {
				is[p.Reason] = p.Since.Sub(began)
			}
			for reason, age := range want {
				if d, ok := is[reason]; !ok || d.Truncate(time.Minute) != age {
					t.Errorf("%s: %q since %s, want %s", when, reason, d, age)
				}
			}
			if len(is) != len(want) {
				t.Errorf("%s: %v, want %v", when, is, want)
			}
		}
		src[0].Report(input.Status{Connected: true})
		src[0].Replace(input.Batch{})
		w.settled()
		ages("nothing", nil)
		a, b := model.Problem{Object: flawed, Where: "x.yaml:1", Reason: "a"}, model.Problem{Object: flawed, Where: "x.yaml:2", Reason: "b"}
		kept := model.Problem{Object: stayed, Where: "x.yaml:9", Reason: "kept", Since: began.Add(-time.Hour)}
		say(a)
		time.Sleep(time.Hour)
		a.Where = "x.yaml:3"
		say(a, b, kept)
		ages("moved", map[string]time.Duration{"a": 0, "b": time.Hour, "kept": -time.Hour})
		time.Sleep(time.Hour)
		say(b, kept)
		time.Sleep(time.Hour)
		say(b, a, kept)
		ages("again", map[string]time.Duration{"a": 3 * time.Hour, "b": time.Hour, "kept": -time.Hour})
		w.stop()
	})
	for range 2 { // the second life ends before the source has spoken
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			w, src := start(t, Config{LastGood: file}, "files")
			w.settled()
			b, _, ok, err := src[0].Before(t.Context())
			if err != nil || !ok || len(b.Problems) != 1 || len(b.Problems[stayed]) != 1 || !b.Problems[stayed][0].Since.Equal(began.Add(-time.Hour)) {
				t.Errorf("before the start: %v %v %v", b.Problems, ok, err)
			}
			w.stop()
		})
	}
}
