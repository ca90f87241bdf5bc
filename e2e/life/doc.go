// Package life tests the life of pods through whole data planes: pods as network
// namespaces with applications in them, two nodes and a registry in one process.
package life
