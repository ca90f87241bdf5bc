package mtls_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
)

// push is a Source whose events the test makes.
type push struct {
	mu   sync.Mutex
	subs map[string]func(*mtls.SVID, error) // by container
	n    int                                // watches begun
	fail error                              // if set, Watch returns it
}

func (p *push) Watch(ctx context.Context, r mtls.Ref, on func(*mtls.SVID, error)) error {
	p.mu.Lock()
	p.n++
	if p.subs == nil {
		p.subs = map[string]func(*mtls.SVID, error){}
	}
	fail := p.fail
	p.subs[r.Container] = on
	p.mu.Unlock()
	if fail != nil {
		return fail
	}
	<-ctx.Done()
	return ctx.Err()
}

func (p *push) send(container string, s *mtls.SVID, err error) {
	p.mu.Lock()
	on := p.subs[container]
	p.mu.Unlock()
	on(s, err)
}

func TestStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
		if err != nil {
			t.Fatal(err)
		}
		src := &push{}
		var mu sync.Mutex
		var said []string
		st := mtls.NewStore(mtls.Config{Source: src, Changed: func(r mtls.Ref, s *mtls.SVID, err error) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				said = append(said, r.Container+": "+err.Error())
			} else {
				said = append(said, r.Container+": new")
			}
		}})
		web, cart := issue(t, ca, "web"), issue(t, ca, "cart")
		ref := mtls.Ref{Container: "c1", Namespace: "t", Account: "web", ID: web.ID}
		st.Add(ref) // before Run
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- st.Run(ctx) }()
		synctest.Wait()
		if st.Current("c1") != nil || st.Current("nobody") != nil {
			t.Error("an identity out of nothing")
		}
		if err := st.Run(ctx); err == nil {
			t.Error("ran twice")
		}

		src.send("c1", web, nil)
		if st.Current("c1") != web {
			t.Error("the SVID is not in force")
		}
		src.send("c1", cart, nil) // another identity
		src.send("c1", nil, errors.New("agent away"))
		src.send("c1", nil, nil)
		if st.Current("c1") != web {
			t.Error("the last good SVID must stay")
		}
		failed := time.Now()
		time.Sleep(time.Minute)
		src.send("c1", nil, errors.New("agent away"))
		if h := st.Held(); len(h) != 1 || h[0].Failure == nil || !h[0].Failure.Since.Equal(failed) || !strings.Contains(h[0].Failure.Err.Error(), "agent away") || h[0].SVID != web {
			t.Errorf("what went wrong last, and since when: %+v", h)
		}
		next := issue(t, ca, "web")
		src.send("c1", next, nil)
		if st.Current("c1") != next {
			t.Error("rotation was not taken")
		}
		if h := st.Held(); h[0].Failure != nil {
			t.Errorf("all is well again: %+v", h[0].Failure)
		}
		mu.Lock()
		got := strings.Join(said, "\n")
		mu.Unlock()
		for i, want := range []string{"c1: new", "wanted " + web.ID.String(), "agent away", "neither", "agent away", "c1: new"} {
			if i >= len(said) || !strings.Contains(said[i], want) {
				t.Errorf("event %d is not %q in:\n%s", i, want, got)
			}
		}

		st.Add(ref) // unchanged
		synctest.Wait()
		if src.n != 1 || st.Current("c1") != next {
			t.Error("adding a pod again must do nothing")
		}
		moved := ref
		moved.ID, moved.Account = cart.ID, "cart"
		st.Add(moved)
		if st.Current("c1") != nil {
			t.Error("the old identity outlived the change")
		}
		synctest.Wait()
		src.send("c1", cart, nil)
		if st.Current("c1") != cart {
			t.Error("the new identity is not in force")
		}

		<-time.After(time.Until(cart.NotAfter) - time.Nanosecond) // synctest's clock
		if st.Current("c1") != cart {
			t.Error("expired too early")
		}
		<-time.After(time.Nanosecond)
		if st.Current("c1") != nil {
			t.Error("an expired SVID is in force")
		}
		src.send("c1", cart, nil)
		if st.Current("c1") != nil {
			t.Error("an expired SVID was taken")
		}

		late := src.subs["c1"]
		st.Remove("c1")
		st.Remove("c1")
		fresh := issue(t, ca, "cart")
		late(fresh, nil)
		if st.Current("c1") != nil {
			t.Error("a removed pod has an identity")
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// A source that ends is asked again, later each time, and never in step.
func TestStoreRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &push{fail: errors.New("no socket")}
		var at []time.Time
		st := mtls.NewStore(mtls.Config{Source: src, Changed: func(_ mtls.Ref, _ *mtls.SVID, err error) { at = append(at, time.Now()) }})
		st.Add(mtls.Ref{Container: "c1"})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		st.Run(ctx)
		if len(at) < 8 || len(at) > 30 {
			t.Errorf("%d attempts in five minutes", len(at))
		}
		for i := 1; i < len(at); i++ {
			d := at[i].Sub(at[i-1])
			if hi := min(time.Second<<(i-1), 30*time.Second); d < hi/2 || d > hi {
				t.Errorf("attempt %d after %s, want %s to %s", i, d, hi/2, hi)
			}
		}
	})
}
