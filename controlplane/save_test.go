package controlplane

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane/model"
)

// TestStartWithoutSources: a node that starts while all of its sources are away serves what it
// knew, says how old that is, and takes what each source says as soon as it says it.
func TestStartWithoutSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "local", "registry", "kube")
		src[0].Replace(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c": {{Namespace: "shop", Name: "web-1", Account: "web", ContainerID: "c", SPIFFEID: "spiffe://td/x"}}}}})
		rows := batch(t, "pods shop/cart*2 8080\npods shop/db 5432=tcp")
		src[1].Report(input.Status{Connected: true})
		src[1].Replace(input.Batch{Tables: input.Tables{Endpoints: rows.Endpoints, Catalog: map[model.ServiceName][]model.ServiceName{{Namespace: "pay", Name: "api"}: {{Namespace: "pay", Name: "api"}}}}})
		kube := batch(t, "service shop/cart 10.96.0.1\nroute shop/r cart\nrule match=prefix:/a set=x:1\nfilter shop/f scope=chain target=cart rbac policy=p;ns:shop")
		src[2].Replace(input.Batch{Tables: input.Tables{Services: kube.Services, Routes: kube.Routes, Filters: kube.Filters}, Settings: &input.Settings{SameNode: model.InProcess}})
		w.settled()
		if r := w.loop.Report(); r.StaleSince != nil || r.LastGood.Path != file.Path() || r.LastGood.Restored {
			t.Errorf("%+v", r)
		}
		away := time.Now()
		src[1].Report(input.Status{Err: "connection refused: start the registrar"})
		time.Sleep(time.Hour)
		if r := w.loop.Report(); r.StaleSince == nil || !r.StaleSince.Equal(away) || r.Sources[1].Connected || !strings.Contains(r.Sources[1].Err, "refused") {
			t.Errorf("while the registrar is away: %+v", r)
		}
		want := w.target.last()
		w.stop()

		// Nobody answers. Of this node's pods the local source speaks, and nobody else.
		w, src = start(t, Config{LastGood: file}, "local", "registry", "kube")
		if w.target.count() != 0 {
			t.Fatal("published before this node's own pods are known")
		}
		src[0].Replace(input.Batch{})
		w.settled()
		s := w.target.last()
		if s == nil || len(w.target.pods) != 0 || len(s.Services()) != len(want.Services()) || s.Service(cart).Port(8080).Program == nil || len(w.endpoints(cart, 8080)) != 2 {
			t.Fatalf("%+v", s)
		}
		r := w.loop.Report()
		if r.Synced || !r.LastGood.Restored || r.StaleSince == nil || !r.StaleSince.Equal(away) || !r.Sources[1].Restored || r.Sources[1].Synced || r.Sources[1].Counts.Endpoints != 3 {
			t.Errorf("%+v", r)
		}
		if m := w.loop.Mesh(); m.SameNode != model.InProcess || len(m.Catalog) != 1 {
			t.Errorf("%+v", m)
		}

		// Kubernetes is heard: its part is what it says now, the registry's what it was. A service
		// without its Service is still there by its rows.
		src[2].Replace(input.Batch{})
		w.settled()
		if svc := w.service(cart); svc == nil || svc.Kubernetes || w.loop.State().Synced || w.loop.Report().StaleSince == nil {
			t.Errorf("%+v", svc)
		}
		// The registry is heard: rows that are not there any more went while nobody looked,
		// and are kept like others that go.
		src[1].Report(input.Status{Connected: true})
		src[1].Replace(input.Batch{Tables: input.Tables{Endpoints: map[model.ServiceName][]model.Endpoint{{Namespace: "shop", Name: "db"}: rows.Endpoints[model.ServiceName{Namespace: "shop", Name: "db"}]}}})
		w.settled()
		if svc := w.service(cart); svc == nil || len(w.endpoints(cart, 8080)) != 0 {
			t.Errorf("a service that went: %+v", svc)
		}
		if r := w.loop.Report(); !r.Synced || r.StaleSince != nil || r.Sources[1].Restored {
			t.Errorf("%+v", r)
		}
		time.Sleep(2 * retention)
		synctest.Wait()
		if w.service(cart) != nil {
			t.Error("kept for ever")
		}
	})
}

// TestBefore: a source is given what it said before the start, its pods included, which nobody serves by that.
func TestBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "file")
		if _, _, ok, err := src[0].Before(t.Context()); ok || err != nil {
			t.Errorf("before anything was kept: %v, %v", ok, err)
		}
		said := batch(t, "pods shop/cart 8080")
		said.Workloads = map[string][]model.Workload{"c1": {{Namespace: "shop", Name: "cart-1", ContainerID: "c1", NetNS: "/run/netns/x"}}}
		src[0].Replace(said)
		w.settled()
		w.stop()
		was := time.Now()
		time.Sleep(time.Hour)
		w, src = start(t, Config{LastGood: file}, "file")
		b, at, ok, err := src[0].Before(t.Context())
		if err != nil || !ok || !at.Equal(was) || len(b.Endpoints) != 1 || len(b.Workloads["c1"]) != 1 || b.Workloads["c1"][0].NetNS != "/run/netns/x" {
			t.Errorf("%+v %v %v %v", b, at, ok, err)
		}
		if n := len(w.target.last().Workloads()); n != 0 {
			t.Errorf("%d pods are served by it", n)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		loop := New(Config{Target: &target{}})
		if _, _, ok, err := loop.Source("x", SourceOptions{}).Before(ended); ok || err == nil {
			t.Errorf("never run: %v, %v", ok, err)
		}
	})
}

// TestNewSourceIsWaitedFor: the last good state of fewer sources is not enough: the policy
// may be the other one's.
func TestNewSourceIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "registry")
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		w.settled()
		w.stop()
		w, src = start(t, Config{LastGood: file}, "kube", "registry")
		time.Sleep(time.Hour)
		synctest.Wait()
		if w.target.count() != 0 {
			t.Fatal("published without a word of Kubernetes")
		}
		src[0].Replace(batch(t, "service shop/cart 10.96.0.1"))
		w.settled()
		if w.target.count() != 1 || len(w.endpoints(cart, 8080)) != 1 {
			t.Errorf("%d published", w.target.count())
		}
	})
}

// TestRestoredSettings: what a source said of settings and place before the start holds until
// it says its whole state, in which they may be gone; those of this life are as before then.
func TestRestoredSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "files")
		src[0].Replace(input.Batch{Settings: &input.Settings{Semantics: model.GatewayAPI, SameNode: model.InProcess}, Locality: &input.Locality{Region: "r"}})
		w.settled()
		w.stop()
		w, src = start(t, Config{LastGood: file}, "files")
		if m := w.loop.Mesh(); m.Semantics != model.GatewayAPI || m.SameNode != model.InProcess || m.Region != "r" {
			t.Errorf("before it is heard: %v, %v, %q", m.Semantics, m.SameNode, m.Region)
		}
		src[0].Replace(input.Batch{KeepSettings: true, Locality: &input.Locality{Region: "r"}})
		w.settled()
		if m := w.loop.Mesh(); m.Semantics != model.GatewayAPI || m.SameNode != model.InProcess || m.Region != "r" {
			t.Errorf("its MeshConfig cannot be read: %v, %v, %q", m.Semantics, m.SameNode, m.Region)
		}
		w.stop()
		w, src = start(t, Config{LastGood: file}, "files")
		src[0].Replace(input.Batch{})
		w.settled()
		if m := w.loop.Mesh(); m.Semantics != model.Aether || m.SameNode != model.MTLS || m.Region != "" || w.target.last().Semantics() != model.Aether {
			t.Errorf("it says none any more: %v, %v, %q", m.Semantics, m.SameNode, m.Region)
		}
		w.stop()
		w, src = start(t, Config{LastGood: file}, "files")
		src[0].Apply(input.Batch{Settings: &input.Settings{SameNode: model.InProcess}, Locality: &input.Locality{Region: "r"}})
		w.settled()
		src[0].Replace(input.Batch{})
		w.settled()
		if m := w.loop.Mesh(); m.SameNode != model.InProcess || m.Region != "r" {
			t.Errorf("said since the start: %v, %q", m.SameNode, m.Region)
		}
	})
}

// TestOthersRestored: who waits for the others hears of it that they have been restored, also
// where nothing can be published yet.
func TestOthersRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "kube")
		src[0].Replace(batch(t, "service shop/cart 10.96.0.1"))
		w.settled()
		w.stop()

		ctx, cancel := context.WithCancel(t.Context())
		loop := New(Config{Target: &target{}, Node: "n1", Domain: model.DefaultDomain, TrustDomain: "td", LastGood: file})
		registry := loop.Source("registry", SourceOptions{}) // new, and Kubernetes is away
		loop.Source("kube", SourceOptions{})
		waits := make(chan error, 1)
		go func() { waits <- registry.WaitForOthers(ctx) }()
		synctest.Wait()
		ended := make(chan error)
		go func() { ended <- loop.Run(ctx) }()
		synctest.Wait()
		if len(waits) != 1 {
			t.Error("it waits for what was there before the start")
		}
		cancel()
		<-ended
		<-waits
	})
}

// TestDamagedLastGood: it is named in log and report, is not used, and the next good state
// takes its place.
func TestDamagedLastGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "last-good")
		if err := os.WriteFile(path, []byte("aether last good state\r\n\x00 and then nothing that makes sense, for long enough to be a header"), 0o600); err != nil {
			t.Fatal(err)
		}
		w, src := start(t, Config{LastGood: lastgood.New(path)}, "registry")
		if w.target.count() != 0 {
			t.Fatal("it was used")
		}
		named := func() bool {
			for _, p := range w.loop.State().Problems {
				if p.Object == "last good state" && p.Where == path && strings.Contains(p.Reason, path+".") {
					return true
				}
			}
			return false
		}
		if !named() || !strings.Contains(w.loop.Report().LastGood.Err, "set aside") {
			t.Errorf("%+v", w.loop.Report())
		}
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		w.settled()
		if !named() {
			t.Error("not told any more, and nothing was written yet")
		}
		time.Sleep(saveSoon)
		synctest.Wait()
		if named() || w.loop.Report().LastGood.Bytes == 0 || w.loop.Counters.Saves.Value() != 1 {
			t.Errorf("%+v", w.loop.Report().LastGood)
		}
		w.stop()
		if !strings.Contains(w.log.String(), "no last good state") {
			t.Errorf("log:\n%s", w.log.String())
		}
	})
}

// TestSaves: soon after a change, then not more than twice a minute, at the end, and now and
// then though nothing changed, for until when it was true is in it.
func TestSaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{LastGood: lastgood.New(filepath.Join(t.TempDir(), "last-good"))}, "registry")
		saves := func() uint64 { synctest.Wait(); return w.loop.Counters.Saves.Value() }
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		time.Sleep(quietObjects + saveSoon - time.Millisecond)
		if n := saves(); n != 0 {
			t.Fatalf("%d before a second", n)
		}
		time.Sleep(2 * time.Millisecond)
		if n := saves(); n != 1 {
			t.Fatalf("%d after a second", n)
		}
		for i := range 600 { // a minute of changes
			b := batch(t, "pods shop/cart 8080")
			b.Endpoints[cart][0].Weight = uint32(i + 1)
			src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: b.Endpoints}})
			time.Sleep(100 * time.Millisecond)
		}
		if n := saves(); n != 2 && n != 3 {
			t.Fatalf("%d after a minute of changes", n)
		}
		time.Sleep(saveEvery)
		n := saves()
		time.Sleep(saveAgain - time.Minute)
		if saves() != n {
			t.Error("written though nothing changed")
		}
		time.Sleep(time.Minute + time.Second)
		if saves() != n+1 {
			t.Error("its age is not written again")
		}
		w.stop()
		if saves() != n+1 {
			t.Error("written at the end though nothing changed")
		}
	})
}

// TestFullDisk: what is there stays, the problem is told once, and goes when there is room.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=65536"); err != nil {
		t.Fatal("mount (the tests run as root): ", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		path, ballast := filepath.Join(dir, "last-good"), filepath.Join(dir, "ballast")
		w, src := start(t, Config{LastGood: lastgood.New(path)}, "registry")
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		time.Sleep(2 * saveSoon)
		synctest.Wait()
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(ballast, make([]byte, 65536), 0o600); err == nil {
			t.Fatal("the disk is not full")
		}
		src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: batch(t, "pods shop/cart*3 8080").Endpoints}})
		time.Sleep(3 * saveEvery)
		synctest.Wait()
		r := w.loop.Report()
		if !strings.Contains(r.LastGood.Err, "no space left") || r.ProblemsTotal != 1 || w.loop.Counters.SaveErrors.Value() < 2 || len(w.endpoints(cart, 8080)) != 3 {
			t.Errorf("%+v", r)
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
			t.Errorf("the file has changed: %v", err)
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		time.Sleep(saveEvery)
		synctest.Wait()
		if r := w.loop.Report(); r.LastGood.Err != "" || r.ProblemsTotal != 0 {
			t.Errorf("with room again: %+v", r)
		}
		w.stop()
		if n := strings.Count(w.log.String(), "no space left"); n != 1 {
			t.Errorf("logged %d times", n)
		}
		_, src = start(t, Config{LastGood: lastgood.New(path)}, "registry")
		if src[0].loop.Wait(context.Background(), 1) != nil || countRows(src[0]) != 3 {
			t.Error("what was written at last is not what was known")
		}
	})
}

// TestEverySourceHolds: a source that goes away changes nothing that it said (a failed listing,
// contract 4.12).
func TestEverySourceHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "registry")
		src[0].Report(input.Status{Connected: true, Version: "7"})
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		w.settled()
		n := w.target.count()
		src[0].Report(input.Status{Err: "gone: look at its log"})
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if w.target.count() != n || len(w.endpoints(cart, 8080)) != 1 || w.loop.Counters.Disconnects.Value() != 1 {
			t.Error("something changed")
		}
		if r := w.loop.Report().Sources[0]; r.Connected || r.SilentMS < 24*3600_000 {
			t.Errorf("%+v", r)
		}
	})
}

// TestSaveForSuccessor: who follows begins with what is in force, however lately the state
// was written.
func TestSaveForSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "registry")
		defer w.stop()
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		time.Sleep(2 * saveSoon)
		src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: batch(t, "pods shop/cart*3 8080").Endpoints}})
		w.settled()
		saves := w.loop.Counters.Saves.Value()
		w.loop.Save()
		w.loop.Save() // nothing is new
		if n := w.loop.Counters.Saves.Value() - saves; n != 1 {
			t.Errorf("written %d times, want once", n)
		}

		next, _ := start(t, Config{LastGood: file}, "registry")
		defer next.stop()
		next.settled()
		if got := next.endpoints(cart, 8080); len(got) != 3 {
			t.Errorf("the successor begins with %v", got)
		}
	})
}

// TestHoldSaves: a process that is followed writes nothing over what its successor wrote, not even
// at its end; it goes on where the successor comes to nothing.
func TestHoldSaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		w, src := start(t, Config{LastGood: file}, "registry")
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		time.Sleep(2 * saveSoon)
		w.loop.Save()
		w.loop.HoldSaves(true)
		const successors = "the successor's"
		if err := os.WriteFile(file.Path(), []byte(successors), 0o600); err != nil {
			t.Fatal(err)
		}
		is := func(want bool) {
			t.Helper()
			b, err := os.ReadFile(file.Path())
			if err != nil || (string(b) == successors) != want {
				t.Errorf("the file is the successor's: %t (%v), want %t", string(b) == successors, err, want)
			}
		}
		change := func(n string) {
			src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: batch(t, "pods shop/cart*"+n+" 8080").Endpoints}})
			time.Sleep(2 * saveAgain)
			synctest.Wait()
		}
		change("2")
		w.loop.Save()
		is(true)
		w.loop.HoldSaves(false) // it failed
		time.Sleep(saveEvery)
		synctest.Wait()
		is(false)
		w.loop.HoldSaves(true)
		if err := os.WriteFile(file.Path(), []byte(successors), 0o600); err != nil {
			t.Fatal(err)
		}
		change("3")
		w.stop()
		is(true)
	})
}

// countRows is how many endpoints a source has.
func countRows(s *Source) (n int) {
	for _, rows := range s.tables.Endpoints {
		n += len(rows)
	}
	return n
}
