package apiserver

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubewatch "k8s.io/apimachinery/pkg/watch"
)

// TestServer holds the server to what tests count on: roles are in force, objects
// survive a crash, and history that was compacted away is gone.
func TestServer(t *testing.T) {
	s := Start(t)
	client := s.Client(t)
	v, err := client.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	if v.GitVersion != "v"+Version {
		t.Errorf("the server is %s, want v%s", v.GitVersion, Version)
	}
	ns := s.Namespace(t)
	s.Account(t, ns, "nobody")
	maps := client.CoreV1().ConfigMaps(ns)

	t.Run("an account may do nothing without a role", func(t *testing.T) {
		nobody := NewClient(t, s.As(t, ns, "nobody"))
		_, err := nobody.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("list configmaps: %v, want forbidden", err)
		}
	})
	t.Run("killed, compacted and restarted", func(t *testing.T) {
		first, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "first"}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "second"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		s.Kill(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := maps.Get(ctx, "first", metav1.GetOptions{}); err == nil {
			t.Error("a server that was killed answers")
		}
		s.Compact(t)
		s.Restart(t)
		if _, err := maps.Get(t.Context(), "second", metav1.GetOptions{}); err != nil {
			t.Errorf("after the crash: %v", err)
		}
		if err := expired(t, s, ns, first.ResourceVersion); !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
			t.Errorf("a watch from before the compaction: %v, want that it is gone", err)
		}
	})
}

// expired is what a watch from an old version says.
func expired(t *testing.T, s *Server, ns, version string) error {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	w, err := s.Client(t).CoreV1().ConfigMaps(ns).Watch(ctx, metav1.ListOptions{ResourceVersion: version})
	if err != nil {
		return err
	}
	defer w.Stop()
	switch e, ok := <-w.ResultChan(); {
	case !ok:
		return errors.New("it ended")
	case e.Type == kubewatch.Error:
		return apierrors.FromObject(e.Object)
	default:
		return errors.New("it goes on: " + string(e.Type))
	}
}
